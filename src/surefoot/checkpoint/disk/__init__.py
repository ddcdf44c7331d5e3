"""The bytes of a checkpoint: headers, the manifest, files, and the commit of a folder."""
