"""How the shipped model is made, stage by stage; ``examples/training/train_model.py`` is the command."""
