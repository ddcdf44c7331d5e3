"""From a recipe to a trained model."""
