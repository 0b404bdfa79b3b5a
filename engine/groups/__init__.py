"""Groups of instances in lockstep: forming, agreeing, recovering."""
