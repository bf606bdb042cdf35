# qkablate in a container: docs/install.md has the lines that build and run it.
FROM python:3.11-slim-bookworm
# The build of torch, by uv's names: cpu, cu130, …; empty for the index's default, which brings CUDA.
ARG UV_TORCH_BACKEND=cpu
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY conf conf
COPY qkablate qkablate
RUN pip install --no-cache-dir --constraint constraints.txt uv \
    && if [ -z "$UV_TORCH_BACKEND" ]; then unset UV_TORCH_BACKEND; fi \
    && uv pip install --system --no-cache --compile-bytecode --constraint constraints.txt .
RUN useradd --create-home qkablate && install --directory --owner qkablate /home/qkablate/outputs
USER qkablate
WORKDIR /home/qkablate
VOLUME /home/qkablate/outputs
ENTRYPOINT ["qkablate"]
