"""The rendezvous of a job's ranks, before there are channels."""
