# The server, for embeddings: docker build -t moontide . && docker run --network host -v moontide:/data moontide
# With an encoder for images: docker build --build-arg EXTRAS=serve,fast,tiny -t moontide .
# docs/serve.md says how to publish its port, which needs a token.
FROM python:3.12-slim AS build
ARG EXTRAS=serve,fast
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY benchmarks/paper benchmarks/paper
RUN python -m venv /opt/moontide \
    && /opt/moontide/bin/pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 moontide && install -d -o moontide /data
COPY --from=build /opt/moontide /opt/moontide
ENV PATH=/opt/moontide/bin:$PATH
USER 10001
WORKDIR /home/moontide
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=5)"]
ENTRYPOINT ["moontide"]
CMD ["serve", "--port", "8000", "--data", "/data"]
