"""What a run will read, request and cost, before it starts."""
