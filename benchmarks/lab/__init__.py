"""What is needed to measure: models that move, memory, an S3 server, a slow link, and both sides as processes."""
