"""From dataset files to micro-batches.

``section`` is what the recipe says. ``rows.catalog`` finds the datasets that it names, and
``rows.rows`` makes an ``example.Example`` of each row, or says why there is none. ``text.codec``
turns examples into token ids and labels, with a template of ``text.templates``. ``training_data``
is the way through all of this and the cache: what it returns is a ``store.dataset`` whose items
are read in place, complete or still being encoded. ``order.loader`` draws global windows from it,
in an order that is a function of (seed, epoch, index), and deals each to ranks and micro-batches;
``text.collation`` makes a batch of each.
"""
