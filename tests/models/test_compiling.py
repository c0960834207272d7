"""What is compiled stays compiled: torch alone would run a function as it is from its ninth version on."""

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounter

from pretrain.models import compiling
from pretrain.models.compiling import compile_strictly


def test_a_function_of_many_versions_stays_compiled_until_it_is_refused(monkeypatch):
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        versions = CompileCounter()
        function = compile_strictly(lambda x: x.sin() + 1, backend=versions, dynamic=False)
        for size in range(2, 22):
            function(torch.ones(size))
        assert versions.frame_count == 20
        monkeypatch.setattr(compiling, "MOST_VERSIONS", 3)
        function = compile_strictly(lambda x: x.cos() + 1, backend=versions, dynamic=False)
        with pytest.raises(FailOnRecompileLimitHit):
            for size in range(2, 22):
                function(torch.ones(size))
        assert versions.frame_count == 23
