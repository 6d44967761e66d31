#!/usr/bin/env bash
# The main job on a machine with nothing but Python 3.11 and pip: makes the environment, unpacks the model, and trains on two ranks.
# All arguments go to grpo_arithmetic.py (try --help); --engine vllm (or sglang) makes and takes the environment that has it.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=transformers
for engine in vllm sglang; do
  case " $* " in *" --engine $engine "* | *" --engine=$engine "*) environment=$engine ;; esac
done
python=$("$(command -v python3.11 || command -v python3)" tests/environments/make.py "$environment")

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1
unset PYTHONDONTWRITEBYTECODE # so that the second start does not compile torch again
model=$("$python" examples/smollm2.py .cache/SmolLM2-135M-Instruct)

case " $* " in *" --help "* | *" -h "*) exec "$python" examples/grpo_arithmetic.py --help ;; esac
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-2}" \
  examples/grpo_arithmetic.py --model "$model" "$@"
