"""What goes wrong around the project, in many cases: `make faults`. Figures: docs/dev/reliability.md."""
