"""What is measured, a module each: `run(options)` returns a `Result`."""
