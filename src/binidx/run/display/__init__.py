"""Runs and samples as people look at them: timelines, figures, text."""
