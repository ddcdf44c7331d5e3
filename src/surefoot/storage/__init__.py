"""The one seam to the disk, and what every room needs of the machine.

``files`` writes and reads whatever must survive a crash, and opens the files of strangers.
``folder_lock`` says who has a folder, ``weight_files`` what kind it is and what its tensors are
called. ``child`` is a process that this one starts, ``parallel_work`` its threads, ``memory`` what
is free, ``cgroups`` what a container gives. ``remote`` names folders in object stores, says what a
hub is and where downloads meet. ``web`` is what both HTTP servers
share. No module here knows a recipe, a checkpoint or torch.
"""
