# docker build -t pipeinfer . ; docker run --rm -v /models:/models pipeinfer mpirun -np 2 pipeinfer run -m /models/m.gguf -p "…"
# MPI: mpich or openmpi, the same as on the other hosts. CMAKE_ARGS: how llama.cpp is compiled; -DGGML_NATIVE=OFF makes an
# image that runs on other processors than the one that built it.
FROM python:3.12-slim-bookworm AS build
ARG MPI=mpich
ARG CMAKE_ARGS="-DLLAVA_BUILD=OFF -DGGML_RPC=ON -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python -m venv /opt/pipeinfer \
    && CMAKE_ARGS="$CMAKE_ARGS" /opt/pipeinfer/bin/pip install --no-cache-dir "/src[$MPI,serve,hub]"

FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 openssh-client && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/pipeinfer /opt/pipeinfer
ENV PATH=/opt/pipeinfer/bin:$PATH OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
CMD ["pipeinfer", "--help"]
