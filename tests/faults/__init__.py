"""What goes wrong around the project, by the thousand: `make faults`. Figures: docs/reliability.md."""
