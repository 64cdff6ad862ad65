"""Chat templates: from messages to a prompt, by the Jinja source that a checkpoint brings along."""
