"""The CPUs, the memory and the devices of this machine, found without torch, and the health of both."""
