"""Plan of a run before it starts: reads, requests, time and cost."""
