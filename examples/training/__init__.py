"""How the shipped model is made, stage by stage; ``examples/train_model.py`` is the command."""
