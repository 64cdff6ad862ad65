"""The part of the OpenAI API that is offered: models and chat completions."""
