# Built in the folder that holds the program.
FROM scratch
COPY prometheus /prometheus
ENTRYPOINT ["/prometheus"]
