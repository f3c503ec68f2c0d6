"""What a run tells: its folder, logs, figures, progress."""
