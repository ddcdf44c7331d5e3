"""A server of OpenAI's API: any checkpoint of a run, by name, from one engine."""
