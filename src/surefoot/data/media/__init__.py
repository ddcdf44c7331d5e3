"""Pictures beside text: which a row has, what tokens they are, what a model gets of them."""
