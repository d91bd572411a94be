"""Plugins that other systems load, one package a system. Each imports its peer only when it is turned on."""
