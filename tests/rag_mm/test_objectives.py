"""What the configuration of the objectives says of them."""

import pytest

from rag_mm import objectives


def test_names_and_streams_follow_the_weights():
    off = objectives.ObjectivesConfig(pdist=0)
    assert not off.streams and not off.marginal and off.reader_names == ("generation",)
    config = objectives.ObjectivesConfig(generation=0, pdist=0, rag_sequence=1, rag_token=2)
    assert config.streams == ("marginal",) and config.trained_streams == (True,) and config.trains_reader
    assert config.reader_names == ("rag_sequence", "rag_token")
    assert not objectives.ObjectivesConfig(generation=0, emdr2=1).trains_reader
    with pytest.raises(ValueError, match="rag_token_score_temperature is 0"):
        objectives.ObjectivesConfig(rag_token_score_temperature=0)
    with pytest.raises(ValueError, match="rag_sequence is -1"):
        objectives.ObjectivesConfig(rag_sequence=-1)
