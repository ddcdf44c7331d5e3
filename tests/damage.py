"""Bytes that a disk gives back otherwise than they were written."""


def flip(path, at=-1):
    """Change one bit of the byte ``at`` of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
