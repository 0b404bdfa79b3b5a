"""Steps of a model against what the machine allows: their least work and their time."""
