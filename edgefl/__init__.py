"""edgefl emulates a fleet of heterogeneous phones on one machine."""
