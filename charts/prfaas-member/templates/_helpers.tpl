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
