"""The decisions about a job of several nodes. Pure; the threads that act on them are in `rendezvous.coordination`."""
