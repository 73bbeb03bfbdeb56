"""What is told of the core's work: phases of requests, totals, reports."""
