{{/* Labels of every object of this chart. */}}
{{- define "prfaas-member.labels" -}}
app.kubernetes.io/name: prfaas-member
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: prfaas
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Namespace of the pools. */}}
{{- define "prfaas-member.namespace" -}}
{{ .Values.namespace.name | default .Release.Namespace }}
{{- end }}

{{- /*
Ports of other engines beside 8000 and 8001, by the label prfaas.io/engine of their pods: first and last. Ports that an
engine chooses for itself are in none of these; see docs/use/engines.md.
*/ -}}
{{- define "prfaas-member.enginePorts" -}}
vllm-prfaas: [[8002, 8033], [5557, 5588]]
vllm-nixl: [[5600, 5615], [5557, 5588]]
vllm-mooncake: [[8998, 8998], [5557, 5588]]
sglang: [[8998, 8998], [5557, 5588]]
{{- end }}
