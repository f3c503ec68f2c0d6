"""The processes of a run: started, watched and ended together."""
