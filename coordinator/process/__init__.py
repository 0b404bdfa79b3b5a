"""Common set-up of all processes: title, logging, exit statuses, run-time directories, tracing."""
