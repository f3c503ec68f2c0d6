"""The rendezvous: where the ranks of a job meet before there are channels."""
