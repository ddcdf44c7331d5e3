"""The networks of a run: the policy's auxiliary models as they are opened."""
