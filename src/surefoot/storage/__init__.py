"""Files and what is around them: the one seam to the disk, hashes, locks, addresses of stores."""
