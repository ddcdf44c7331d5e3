import torch

from surefoot.checkpoint.sources.source import JoinedSource, TensorsInMemory, read_whole


def test_sources_stand_beside_each_other_with_what_tells_their_names_apart():
    one, other = torch.ones(2), torch.zeros(3, dtype=torch.int64)
    source = JoinedSource(
        [("", TensorsInMemory({"a": one})), ("moment.", TensorsInMemory({"a": other}))]
    )
    assert source.shapes() == {"a": (2,), "moment.a": (3,)}
    assert source.dtypes() == {"a": torch.float32, "moment.a": torch.int64}
    assert torch.equal(read_whole(source, "a"), one)
    assert torch.equal(read_whole(source, "moment.a"), other)
