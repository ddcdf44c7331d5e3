"""Parts of tensors as integers: boxes, shardings, meshes, slices. No torch here."""
