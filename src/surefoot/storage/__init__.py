"""The one seam to the disk, hashes, locks, addresses of object stores."""
