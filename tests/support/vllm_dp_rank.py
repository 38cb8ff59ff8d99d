"""A program that is one rank of vLLM's engine with its experts spread over data-parallel ranks.

    python vllm_dp_rank.py RANK RANKS PORT MODEL SWITCH ANSWER

PRETUNED_VLLM is SWITCH. What the engine says to the prompts of tests/support/vllm_engine.py, each rank to one of them,
what pretuned's experts were called with, and vLLM's all-to-all go to ANSWER, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def all_to_all(worker: Any) -> str:
    """In a worker: the class of vLLM's all-to-all."""
    from vllm.distributed.parallel_state import get_ep_group

    return type(get_ep_group().device_communicator.all2all_manager).__name__


def main(rank: int, ranks: int, port: str, model: Path, switch: str, answer: Path) -> None:
    """Make the engine, ask it, and write down what it said."""
    os.environ.update(
        VLLM_DP_RANK=str(rank),
        VLLM_DP_RANK_LOCAL=str(rank),
        VLLM_DP_SIZE=str(ranks),
        VLLM_DP_MASTER_IP="127.0.0.1",
        VLLM_DP_MASTER_PORT=port,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        TORCHDYNAMO_DISABLE="1",
    )
    import vllm_engine

    def ask(llm: Any) -> Any:
        if switch == "1":
            llm.collective_rpc(vllm_engine.count)
        vllm_engine.PROMPTS[:] = vllm_engine.PROMPTS[rank : rank + 1]
        generated = vllm_engine.generate(llm)
        calls = llm.collective_rpc(vllm_engine.seen) if switch == "1" else []
        return {"tokens": generated.tokens, "calls": calls, "all_to_all": llm.collective_rpc(all_to_all)}

    said = vllm_engine.run(model, switch, ask, enable_expert_parallel=True)
    answer.write_text(json.dumps(said))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5], Path(sys.argv[6]))
