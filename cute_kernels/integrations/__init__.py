"""What other systems load by themselves, one package a system. Each imports its peer only when it is turned on."""
