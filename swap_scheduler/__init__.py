"""Floor 0, decide: what moves where and when, before a step starts. Standard library only: no clock, no I/O."""
