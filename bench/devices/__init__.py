"""The parts of the programs about several devices: what is split, how long halos travel, what is predicted."""
