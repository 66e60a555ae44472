"""From byte ranges to requests: scheduling, retries, hedging and cancellation."""
