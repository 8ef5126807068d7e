# hf-neuron-moe on a CPU, with what `hf-neuron-moe train`, `demo`, `explore` and `convert` need.
#
#   docker build -t hf-neuron-moe .
#   docker run --rm hf-neuron-moe doctor
#   docker run --rm -v "$PWD:/work" hf-neuron-moe convert SRC DST --precision mxfp8
#
# TORCH_INDEX is where the CPU build of torch comes from: --build-arg TORCH_INDEX=URL for a mirror.
FROM python:3.13-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HF_HOME=/work/.cache/huggingface
RUN pip install torch==2.13.0 --index-url "$TORCH_INDEX"
COPY pyproject.toml README.md LICENSE /src/
COPY hf_neuron_moe /src/hf_neuron_moe
RUN pip install "/src[train]" && rm -r /src && useradd --create-home user && mkdir /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["hf-neuron-moe"]
CMD ["--help"]
