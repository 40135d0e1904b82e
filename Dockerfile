# The sidecars: `docker build -t weightcast .`, then `docker run weightcast subscribe s3://weights/policy --into /model`.
FROM python:3.11-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.11-slim
# The CPU build of torch: the sidecars do their work on the CPU, and it is a tenth of the size.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /etc/weightcast/constraints.txt
COPY --from=build /dist /tmp/dist
RUN pip install --no-cache-dir --constraint /etc/weightcast/constraints.txt \
      ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} /tmp/dist/*.whl \
 && rm -r /tmp/dist \
 && useradd --uid 10001 --create-home weightcast \
 && install --directory --owner=weightcast --group=weightcast /checkpoints /model
# Compiled kernels are cached here, so that a read-only root file system works with a tmpfs on /tmp.
ENV NUMBA_CACHE_DIR=/tmp/numba PYTHONUNBUFFERED=1
USER weightcast
EXPOSE 9400
ENTRYPOINT ["weightcast"]
