"""Tasks: what is asked, and how answers are scored. `tasks.registry` finds them by name."""
