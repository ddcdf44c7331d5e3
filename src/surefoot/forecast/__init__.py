"""What a run will take: ``plan`` estimates, ``bench`` measures."""
