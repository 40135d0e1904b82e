"""The `weightcast` command. Each subcommand is a module of its own, imported when it runs."""
