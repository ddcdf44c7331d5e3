"""The server of OpenAI's API: a model, the checkpoints of a run, and adapters behind one address.

``plugin`` names the command, ``command`` reads its options, ``app`` has the addresses and the guard
in front of them. A request is read by ``body``, which refuses what it does not understand, and
becomes the responses of ``completions``: the prompt as the model saw it in training (``prompts``),
rows that are sampled as asked (``sampling``), perhaps under a ``grammar``. ``responses`` lets them
in, gives them to the one thread that runs models (``engine``), and puts the tokens that come back
together, as a stream or in one piece; ``response_text`` parts thoughts, text and calls.

``models`` has the models by name; those that are adapters of one base share its weights and passes
(``shared_base``).
"""
