"""Pure scheduling algorithms, one file each, behind one protocol."""
